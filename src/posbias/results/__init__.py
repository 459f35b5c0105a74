"""How results are shown: as text, tables and pictures; pictures are described once and drawn on a page or as PNG."""
