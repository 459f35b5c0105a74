"""The texts of the study from two Debian packages: six novels by Jane Austen, four manuals of Python 3.11.

    apt-get download r-cran-janeaustenr python3.11-doc
    for package in *.deb; do dpkg -x "$package" unpacked; done
    python studies/trained_models/texts.py --root unpacked --out texts

Each novel and each manual is one document; a line with a form feed parts them, so no prompt holds two.
"""

import argparse
import hashlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from posbias.files import write_atomically

NOVELS = Path("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
MANUALS = Path("usr/share/doc/python3.11/html/_sources")
TECHNICAL = ("tutorial", "howto", "faq", "extending")
BORDER = "\n\f\n"

STRINGS, STRING = 16, 9
"""Types of R's serialisation: a vector of strings, one string."""
UTF8 = 1 << 15
"""Of a string's flags: encoded in UTF-8; otherwise in Latin-1 or ASCII."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the packages are unpacked or installed")
    parser.add_argument("--out", type=Path, required=True, help="directory of the two texts")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, documents in (("novels", novels(given.root / NOVELS)), ("technical", technical(given.root / MANUALS))):
        text = (BORDER.join(documents) + "\n").encode()
        write_atomically(given.out / f"{name}.txt", text)
        print(f"{given.out / name}.txt: {len(text):,} bytes, sha256 {hashlib.sha256(text).hexdigest()}")


def novels(database: Path) -> Iterator[str]:
    """Every vector of strings in a database of R, one line per string."""
    left = database.read_bytes()
    while left:
        reader = zlib.decompressobj()
        unpacked = reader.decompress(left[4:])
        left = reader.unused_data
        yield "\n".join(_strings(unpacked))


def _strings(serialised: bytes) -> Iterator[str]:
    """Behind a header that ends with the name of the native encoding."""
    place = serialised.index(b"UTF-8") + len(b"UTF-8")
    flags, count = struct.unpack_from(">II", serialised, place)
    if flags & 0xFF != STRINGS:
        raise ValueError(f"R type {flags & 0xFF}; allowed: {STRINGS}, a vector of strings")
    place += 8
    for _ in range(count):
        flags, length = struct.unpack_from(">II", serialised, place)
        if flags & 0xFF != STRING:
            raise ValueError(f"R type {flags & 0xFF} in a vector of strings; allowed: {STRING}")
        place += 8 + length
        yield serialised[place - length : place].decode("utf-8" if flags & UTF8 else "latin-1")


def technical(sources: Path) -> Iterator[str]:
    """The manuals' chapters in the order of their names, as written in reStructuredText."""
    for manual in TECHNICAL:
        yield "\n".join(chapter.read_text(encoding="utf-8") for chapter in sorted((sources / manual).glob("*.rst.txt")))


if __name__ == "__main__":
    main()
