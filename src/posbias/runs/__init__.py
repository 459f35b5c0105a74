"""What a run leaves behind and how its work is done: records, finished parts, locked directories, engines."""
