"""What the user gave: model, optimizers, rates, precision and options, checked."""
