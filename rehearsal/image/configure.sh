#!/bin/bash
# Turn a freshly unpacked root folder into a rehearsal host. Usage: configure.sh ROOT
set -euo pipefail
root=$1

# Every host gets these from hosts.sh; two hosts with one identity would confuse journal and SSH.
: >"$root/etc/machine-id"
rm -f "$root"/etc/ssh/ssh_host_*

# No name server is reachable from a host, and each look-up would wait for its time-out.
: >"$root/etc/resolv.conf"
sed -i 's/^hosts:.*/hosts: files/' "$root/etc/nsswitch.conf"

# Keep the journal across reboots, as on a server.
mkdir -p "$root/var/log/journal"

# Packages enable these, but only a role may start them; the timers would look for package mirrors.
chroot "$root" systemctl disable haproxy.service prometheus.service
chroot "$root" systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
  e2scrub_all.timer fstrim.timer

# Package lists and caches are of no use without a network.
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin
