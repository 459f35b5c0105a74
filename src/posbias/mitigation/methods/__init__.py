"""The methods against position bias, one file each, found by its name; what all of them share stands beside."""
