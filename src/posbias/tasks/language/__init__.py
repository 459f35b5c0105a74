"""Tasks in language, with the answer at a chosen position of the context; one file each."""
