#!/bin/sh
# The discovery of the tests: prints the hosts file. It fails while there is a file <hosts>.broken
# beside it.
[ ! -e "$1.broken" ] && exec cat "$1"
echo "the discovery is down, as planned" >&2
exit 1
