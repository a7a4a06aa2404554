"""Events: declared, written, sent and read; and the history that they tell."""
