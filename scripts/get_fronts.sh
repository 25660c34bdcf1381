#!/bin/sh
# Unpack nginx and HAProxy of this Debian into a folder, for `make attack`; needs no root.
# It changes nothing if they are there, and ends with 1 if they cannot be had.
set -eu
folder=$1
PATH=$PATH:/usr/sbin:$folder/usr/sbin
if command -v nginx >/dev/null && command -v haproxy >/dev/null; then
    exit 0
fi
command -v apt-get >/dev/null && command -v dpkg >/dev/null
mkdir -p "$folder/packages"
names=$(apt-get -o Debug::NoLocking=true -qq --simulate --no-install-recommends \
    install nginx haproxy | sed -n 's/^Inst \([^ ]*\) .*/\1/p')
cd "$folder/packages"
# shellcheck disable=SC2086  # one word for each package
timeout 120 apt-get -o APT::Sandbox::User=root -qq download $names
for package in *.deb; do
    dpkg -x "$package" ..
done
