"""Storage and work of runs: records, finished parts, locked directories, engines."""
