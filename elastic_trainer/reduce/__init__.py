"""The gradients of all micro-batches become one, in flat buffers."""
