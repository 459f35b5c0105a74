"""The methods against position bias, one file each; `base.py` names them, and what all of them share stands beside."""
