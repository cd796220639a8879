#!/bin/sh -e
# Random tokens in deploy/secrets (or the directory given), one file each; those that exist are kept.
# The directory is private. The files can be read by all: containers see them under their own user ids.
umask 077
directory=${1:-$(dirname "$0")/secrets}
mkdir -p "$directory"
for name in data_token admin_token push_token grafana_password; do
    [ -s "$directory/$name" ] || od -An -tx1 -N24 /dev/urandom | tr -d ' \n' > "$directory/$name"
    chmod 444 "$directory/$name"
done
