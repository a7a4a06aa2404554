#!/bin/sh
# The tests' discovery: prints the hosts file; fails while a file named <hosts>.broken lies beside it.
[ ! -e "$1.broken" ] && exec cat "$1"
echo "the discovery is down, as planned" >&2
exit 1
