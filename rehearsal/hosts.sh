#!/bin/bash
# The rehearsal hosts: four Debian machines on this one, each with its own systemd, sshd and address.
#
#   hosts.sh up [pilot]             boot what is not up yet; the first time makes the root image. The pilot is a
#                                   fifth machine that may play the control host, with a reconciler of its own
#   hosts.sh down                   take everything away again, the hosts' disks included
#   hosts.sh status                 one line a host; exits 0 when all four answer
#   hosts.sh in CMD...              run CMD in the hosts' network (this machine's files and programs)
#   hosts.sh ssh NAME [CMD...]      a shell, or CMD, on a host
#   hosts.sh put NAME SRC DEST      copy a file, or the content of a folder, onto a host
#   hosts.sh alone CMD...           run CMD as the one rehearsal on this machine, or refuse
#   hosts.sh freeze | thaw NAME     the host hangs: its address answers, its programs do not
#   hosts.sh cut | mend NAME        pull the host's network cable, plug it in again; `control` is this machine
#   hosts.sh part | join NAME NAME  two hosts do not hear each other, or do again; the others hear both
#   hosts.sh poweroff | poweron NAME   no goodbye to anyone; the disk stays
#
# The hosts sit on a bridge in the network namespace `seatrial`. Nothing joins that namespace to this
# machine's own network and no host has a default route, so no packet can leave; while they are up, an
# unreachable route keeps packets for them from leaving this machine by mistake.
#
# SEATRIAL_BERTH=1 hosts.sh ... speaks of another four, with the same names and addresses in namespaces of
# their own: tests use it to rehearse several things at once. 1 to 9; without it, the hosts above.
set -euo pipefail

declare -rA ADDRESS=([gpu-a]=10.77.0.11 [gpu-b]=10.77.0.12 [gpu-c]=10.77.0.13 [edge]=10.77.0.10
  [pilot]=10.77.0.9)
readonly NAMES=(gpu-a gpu-b gpu-c edge) # what every rehearsal needs
readonly ALL=("${NAMES[@]}" pilot)
readonly NETWORK=10.77.0.0/24 CONTROL=10.77.0.1
readonly BERTH=${SEATRIAL_BERTH:-}
readonly NAMESPACE=seatrial$BERTH
readonly STATE=/var/lib/seatrial-rehearsal$BERTH
readonly LOCKS=/run/lock
readonly BOOT_SECONDS=120 # generous: other work may hold both cores while the hosts boot
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly HERE

main() {
  local verb=${1:-help}
  shift || true
  [[ $BERTH =~ ^[1-9]?$ ]] || die "SEATRIAL_BERTH should be 1 to 9, or not set; is '$BERTH'."
  case $verb in
    up) as_root && pilot_or_none "$@" && up "$@" ;;
    down | status) as_root && "$verb" ;;
    in) as_root && in_network "$@" ;;
    ssh | put | alone) as_root && "on_$verb" "$@" ;;
    cut | mend) as_root && known_or_control "${1:-}" && "host_$verb" "$1" ;;
    freeze | thaw | poweroff | poweron) as_root && known "${1:-}" && "host_$verb" "$1" ;;
    part | join) as_root && known "${1:-}" && known "${2:-}" && "hosts_$verb" "$1" "$2" ;;
    supervise) supervise "$1" ;; # for this script only
    *) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" ;;
  esac
}

say() { echo "rehearsal hosts: $*"; }

die() {
  say "$*" >&2
  exit 1
}

as_root() { ((EUID == 0)) || die "namespaces and mounts need root; run this with sudo."; }

known() { [[ -n ${ADDRESS[${1:-none}]:-} ]] || die "no host '$1'; they are ${ALL[*]}."; }

pilot_or_none() { [[ $# == 0 || $* == pilot ]] || die "up: should name the pilot or nothing, names '$*'."; }

known_or_control() { [[ ${1:-} == control ]] || known "${1:-}"; }

# --- up -----------------------------------------------------------------------------------------

up() { # with a host's name: that one besides those that every rehearsal needs
  local image name booted=() wanted=("${NAMES[@]}" "$@")
  one_at_a_time
  cgroup_hierarchies >/dev/null # or say at once that this kernel cannot do it
  install_missing_programs
  if [[ ! -e $STATE/complete ]]; then
    take_down # what a killed `up` may have left
    refuse_foreign_network
    trap 'take_down' EXIT
    image=$("$HERE/image/make.sh")
    make_state "$image"
    make_network
    for name in "${ALL[@]}"; do
      make_disk "$name"
      plug_in "$name"
    done
  fi
  for name in "${wanted[@]}"; do
    is_booted "$name" || { boot "$name" && booted+=("$name"); }
  done
  await "${wanted[@]}"
  touch "$STATE/complete"
  trap - EXIT
  if ((${#booted[@]})); then say "booted ${booted[*]}"; else say "already up: ${wanted[*]}"; fi
}

one_at_a_time() {
  mkdir -p "$LOCKS"
  exec 8>"$LOCKS/seatrial-rehearsal-hosts$BERTH.lock"
  flock --nonblock 8 || die "another 'hosts.sh up' or 'down' is at work; wait until it has ended."
  # Inside the hosts' network there is no mirror to fetch from, and `down` would end itself.
  [[ ! -e /run/netns/$NAMESPACE ]] ||
    [[ $(stat -Lc %i /proc/self/ns/net) != $(stat -Lc %i "/run/netns/$NAMESPACE") ]] ||
    die "'up' and 'down' run outside the hosts' network, not under 'hosts.sh in'."
}

install_missing_programs() {
  local -A package=([systemd-nspawn]=systemd-container [mmdebstrap]=mmdebstrap [ip]=iproute2
    [mksquashfs]=squashfs-tools [ssh]=openssh-client [curl]=curl)
  local program missing=()
  for program in "${!package[@]}"; do
    command -v "$program" >/dev/null || missing+=("${package[$program]}")
  done
  [[ -e /usr/share/keyrings/debian-archive-keyring.gpg ]] || missing+=(debian-archive-keyring)
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || die "please install ${missing[*]}, then try again."
  say "installing ${missing[*]}"
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

refuse_foreign_network() {
  local route
  route=$(ip route show to root "$NETWORK" | grep -v '^unreachable ' || true)
  [[ -z $route ]] || die "this machine already has a route to $NETWORK ($route); the hosts need it."
}

make_state() {
  local image=$1 name
  mkdir -p "$STATE/image" "$STATE/hosts"
  chmod 700 "$STATE"
  mount -o loop,ro "$image" "$STATE/image"
  ssh-keygen -q -t ed25519 -N '' -C seatrial-rehearsal -f "$STATE/key"
  {
    echo "127.0.0.1 localhost"
    echo "$CONTROL control"
    for name in "${ALL[@]}"; do echo "${ADDRESS[$name]} $name"; done
  } >"$STATE/hosts.table"
  write_ssh_config >"$STATE/ssh_config"
}

write_ssh_config() {
  local name
  for name in "${ALL[@]}"; do printf 'Host %s\n  HostName %s\n' "$name" "${ADDRESS[$name]}"; done
  cat <<END
Host *
  User root
  IdentityFile $STATE/key
  IdentitiesOnly yes
  UserKnownHostsFile $STATE/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  ConnectTimeout 10
  ServerAliveInterval 10
  ServerAliveCountMax 6
END
}

make_network() {
  ip route replace unreachable "$NETWORK"
  ip netns add "$NAMESPACE"
  ip -n "$NAMESPACE" link set lo up
  ip -n "$NAMESPACE" link add bridge type bridge
  ip -n "$NAMESPACE" addr add "$CONTROL/24" dev bridge
  ip -n "$NAMESPACE" link set bridge up
}

make_disk() {
  local name=$1 disk=$STATE/hosts/$1 root=$STATE/hosts/$1/root
  mkdir -p "$disk"/{upper,work,root}
  # volatile: the disk lives no longer than the hosts, so syncing it would only cost time.
  mount -t overlay "$NAMESPACE-$name" "$root" \
    -o "lowerdir=$STATE/image,upperdir=$disk/upper,workdir=$disk/work,volatile"
  echo "$name" >"$root/etc/hostname"
  echo "seatrial-rehearsal-$name" | md5sum | cut -c1-32 >"$root/etc/machine-id"
  cp "$STATE/hosts.table" "$root/etc/hosts"
  install -D -m 600 "$STATE/key.pub" "$root/root/.ssh/authorized_keys"
  ssh-keygen -q -t ed25519 -N '' -C "$name" -f "$root/etc/ssh/ssh_host_ed25519_key"
  echo "$name,${ADDRESS[$name]} $(cut -d' ' -f1,2 "$root/etc/ssh/ssh_host_ed25519_key.pub")" \
    >>"$STATE/known_hosts"
}

plug_in() {
  local name=$1 host=$NAMESPACE-$1
  ip netns add "$host"
  ip -n "$host" link set lo up
  ip -n "$host" link add eth0 type veth peer name "to-$name" netns "$NAMESPACE"
  ip -n "$host" addr add "${ADDRESS[$name]}/24" dev eth0
  ip -n "$host" link set eth0 up
  ip -n "$NAMESPACE" link set "to-$name" master bridge up
}

# systemd-nspawn run with --keep-unit puts its host below the cgroup it is started in: one for each
# host keeps them apart, and is the handle by which a host is frozen and ended.
cgroup_hierarchies() {
  if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
    echo /sys/fs/cgroup
  elif [[ -d /sys/fs/cgroup/unified ]]; then
    echo /sys/fs/cgroup/unified
    [[ ! -d /sys/fs/cgroup/systemd ]] || echo /sys/fs/cgroup/systemd
  else
    die "this kernel offers no cgroup v2 hierarchy under /sys/fs/cgroup, which the hosts need."
  fi
}

host_cgroup() { echo "$(cgroup_hierarchies | head -1)/$NAMESPACE-$1"; }

boot() {
  # A session of its own, so that Ctrl-C or a closed terminal does not reach the host; 8 is the lock.
  setsid --fork "$HERE/hosts.sh" supervise "$1" </dev/null >>"$STATE/hosts/$1/console.log" 2>&1 8>&-
}

supervise() { # runs a host, and again after each reboot, which nspawn tells by status 133
  local name=$1 status=133 hierarchy
  while ((status == 133)); do
    status=0
    (
      for hierarchy in $(cgroup_hierarchies); do
        mkdir -p "$hierarchy/$NAMESPACE-$name"
        echo "$BASHPID" >"$hierarchy/$NAMESPACE-$name/cgroup.procs"
      done
      run_host "$name"
    ) || status=$?
    say "$name ended with status $status"
  done
  exit # not back into this file, which may have been edited since the host booted
}

run_host() {
  # Pure cgroup v2 inside, as on a current server; /tmp on disk, since memory is scarce.
  export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 SYSTEMD_NSPAWN_TMPFS_TMP=0
  # bpf: systemd enforces IPAddressDeny= and DevicePolicy= with it; without, units would be tested
  # with those settings silently off.
  exec systemd-nspawn --quiet --boot --directory="$STATE/hosts/$1/root" \
    --machine="$1$BERTH" --hostname="$1" --register=no --keep-unit \
    --network-namespace-path="/run/netns/$NAMESPACE-$1" \
    --resolv-conf=off --timezone=off --link-journal=no --console=pipe \
    --capability=CAP_BPF,CAP_PERFMON --system-call-filter=bpf
}

await() {
  local name deadline=$((SECONDS + BOOT_SECONDS))
  for name in "$@"; do
    until is_answering "$name"; do
      ! is_frozen "$name" || die "$name is frozen; 'hosts.sh thaw $name' first."
      ! is_cut "$name" || die "$name's cable is pulled; 'hosts.sh mend $name' first."
      ((SECONDS < deadline)) || {
        tail -n 20 "$STATE/hosts/$name/console.log" >&2
        die "$name did not answer on port 22 within $BOOT_SECONDS s; its console's last lines are above."
      }
      sleep 0.1
    done
  done
}

is_booted() { grep -qs '^populated 1' "$(host_cgroup "$1")/cgroup.events"; }

is_frozen() { grep -qs '^frozen 1' "$(host_cgroup "$1")/cgroup.events"; }

is_cut() { ! ip -n "$NAMESPACE" link show "to-$1" up 2>/dev/null | grep -q .; }

is_answering() { # an SSH greeting within two seconds
  # shellcheck disable=SC2016 # expanded by the inner shell
  in_network timeout 2 bash -c 'exec 3<>"/dev/tcp/$1/22" && read -r -u 3 line && [[ $line == SSH* ]]' \
    _ "${ADDRESS[$1]}" 2>/dev/null
}

# --- down ---------------------------------------------------------------------------------------

down() {
  one_at_a_time
  take_down
  say "down"
}

take_down() { # from what is there, not from what should be: works after any half-made `up`
  local name mountpoint
  for name in "${ALL[@]}"; do end_host "$name"; done
  for name in "${ALL[@]/#/$NAMESPACE-}" "$NAMESPACE"; do remove_namespace "$name"; done
  # Deepest first; a process of this machine that still looks into a host must not stop the clean-up.
  while read -r mountpoint; do
    umount "$mountpoint" 2>/dev/null || umount --lazy "$mountpoint"
  done < <(awk -v state="$STATE/" 'index($2, state) == 1 { print $2 }' /proc/self/mounts | sort -r)
  # As long as any berth is taken.
  compgen -G '/run/netns/seatrial*' >/dev/null || ! ip route show to exact "$NETWORK" | grep -q '^unreachable' ||
    ip route del unreachable "$NETWORK"
  rm -rf --one-file-system "$STATE"
}

end_host() {
  local name=$1 hierarchy
  if [[ -e $(host_cgroup "$name")/cgroup.kill ]]; then
    echo 1 >"$(host_cgroup "$name")/cgroup.kill"
    while is_booted "$name"; do sleep 0.05; done
  fi
  for hierarchy in $(cgroup_hierarchies); do
    [[ ! -d $hierarchy/$NAMESPACE-$name ]] ||
      find "$hierarchy/$NAMESPACE-$name" -depth -type d -exec rmdir {} +
  done
  rm -rf "/run/systemd/nspawn/propagate/$name$BERTH" \
    "/run/systemd/nspawn/locks/inode-$(stat -c %d:%i "$STATE/hosts/$name/root" 2>/dev/null)"
}

remove_namespace() { # and end what still runs in it: a kept SSH connection, a command under `in`
  local pids
  [[ -e /run/netns/$1 ]] || return 0
  for _ in {1..20}; do
    pids=$(ip netns pids "$1")
    [[ -n $pids ]] || break
    # shellcheck disable=SC2086 # a list of process ids
    kill $pids 2>/dev/null || true
    sleep 0.1
  done
  # shellcheck disable=SC2086
  [[ -z $pids ]] || kill -KILL $pids 2>/dev/null || true
  ip netns del "$1"
}

# --- in between ---------------------------------------------------------------------------------

status() {
  local name state all_answer=0
  for name in "${ALL[@]}"; do
    [[ $name != pilot ]] || is_booted pilot || continue
    if ! is_booted "$name"; then state="off"
    elif is_frozen "$name"; then state="frozen"
    elif is_cut "$name"; then state="cut off"
    elif is_answering "$name"; then state="answers"
    else state="no sshd yet"; fi
    [[ $state == answers ]] || all_answer=1
    printf '%-6s %-11s %s\n' "$name" "${ADDRESS[$name]}" "$state"
  done
  return "$all_answer"
}

in_network() {
  [[ -e /run/netns/$NAMESPACE ]] || die "the hosts are not up; 'hosts.sh up' first."
  nsenter --net="/run/netns/$NAMESPACE" -- "$@"
}

on_ssh() {
  known "${1:-}"
  in_network ssh -F "$STATE/ssh_config" "$@"
}

on_put() {
  local name=$1 source=$2 target
  target=$(printf %q "$3")
  if [[ -d $source ]]; then
    tar -C "$source" -cf - . | on_ssh "$name" "mkdir -p $target && tar -C $target --no-same-owner -xf -"
  else
    on_ssh "$name" "mkdir -p \"\$(dirname $target)\" && cat >$target" <"$source"
  fi
}

on_alone() {
  mkdir -p "$LOCKS"
  flock --nonblock --close --conflict-exit-code 75 "$LOCKS/seatrial-rehearsal$BERTH.lock" "$@" || {
    local status=$?
    ((status != 75)) || say "another rehearsal runs on this machine; wait for it, or end it first." >&2
    return "$status"
  }
}

host_freeze() { echo 1 >"$(host_cgroup "$1")/cgroup.freeze"; }

host_thaw() { echo 0 >"$(host_cgroup "$1")/cgroup.freeze"; }

host_cut() {
  if [[ $1 == control ]]; then
    ip -n "$NAMESPACE" addr del "$CONTROL/24" dev bridge # the hosts go on hearing each other
  else
    ip -n "$NAMESPACE" link set "to-$1" down
  fi
}

host_mend() { # and wait for the host to be heard again, which takes up to a second
  if [[ $1 == control ]]; then
    ip -n "$NAMESPACE" addr replace "$CONTROL/24" dev bridge
    return
  fi
  ip -n "$NAMESPACE" link set "to-$1" up
  if is_booted "$1" && ! is_frozen "$1"; then await "$1"; fi
}

# Ports of a bridge that are isolated do not reach one another.
hosts_part() { isolate on "$@"; }

hosts_join() { isolate off "$@"; }

isolate() {
  local name
  for name in "$2" "$3"; do
    ip -n "$NAMESPACE" link set dev "to-$name" type bridge_slave isolated "$1"
  done
}

host_poweroff() { end_host "$1"; }

host_poweron() { is_booted "$1" || boot "$1"; }

main "$@"
