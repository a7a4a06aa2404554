"""The places in which machines are rented, one of them for each NAME.py: EC2."""
