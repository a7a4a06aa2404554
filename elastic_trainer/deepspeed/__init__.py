"""DeepSpeed's JSON: read, checked, and turned into an optimizer and the trainer's options."""
