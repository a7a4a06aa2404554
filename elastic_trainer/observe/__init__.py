"""What a run writes down of itself, and what people read of it."""
