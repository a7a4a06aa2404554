"""What crosses the border of a process: messages, signatures, limits of connections, untrusted
text. This package imports none of the other packages.
"""
