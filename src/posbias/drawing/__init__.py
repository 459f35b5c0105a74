"""Pictures of any object: described once, drawn on a page (`interactive`) or as a PNG (`static`)."""
