"""Horovod for one environment: its patches, and the command that builds and installs it.

    sources (applies the patches) ─┐
    target (what it is built for) ─┼─► build ─► command ◄─ elastic-trainer setup, install.sh
      cuda (NCCL, toolkit, GPUs)   │     cause (why a build has failed)
    needs (what a machine lacks) ──┘
    required: the check at the start of a run

What always holds:
1. All modules but `required` need the standard library alone, and import nothing of ours outside
   this package: deploy/install.sh and the Dockerfile run them before anything else is there.
2. Our wheel does not require Horovod: pip would build it from the unpatched sources, which fails
   with torch 2.1 or newer. Our wheel requires what Horovod needs (setup.cfg), so this package
   installs Horovod alone.
"""
