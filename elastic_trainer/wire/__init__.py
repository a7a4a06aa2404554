"""What crosses the border of a process: messages, signatures, limits of connections, text of
others. It imports nothing of the other packages, but for errors.
"""
