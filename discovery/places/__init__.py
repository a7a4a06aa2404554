"""The places in which machines are rented. EC2: ec2.py and ec2_*.py. Google Cloud: gcp*.py. Azure:
azure*.py. Kubernetes: kubernetes*.py. Slurm: slurm*.py.

To add a place, see discovery/place_protocol.py.
"""
