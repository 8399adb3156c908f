#!/usr/bin/env bash
# Starts this node's ranks of a job on several nodes. Run the same command on every node:
#
#   HEAD=10.0.0.1 NODES=2 INTERFACE=eth0 examples/cluster/torchrun.sh SCRIPT [ARGUMENTS]
#
#   HEAD       address of one of the nodes, the same everywhere
#   NODES      how many there are; 2:4 lets a job run on two to four
#   RANKS      of a node: a number, or auto, which is one for each GPU
#   INTERFACE  of the network that joins the nodes (see ip addr), where a node has several
#   RESTARTS   how often the ranks start again after a failure
set -euo pipefail
: "${HEAD:?the address of one of the nodes}"

options=()
if [[ -n ${INTERFACE:-} ]]; then
  export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
  # Otherwise torchrun tells the others this node's host name, which may be that of another network.
  options+=(--local-addr "$(ip -4 -o addr show "$INTERFACE" | sed -E 's|.* inet ([0-9.]+).*|\1|;q')")
fi
if [[ " $(hostname -I) " == *" $HEAD "* ]]; then
  options+=(--rdzv-conf is_host=1) # torchrun looks at the addresses of the host name alone
fi
# Ranks that start again would otherwise read addresses of before in the agents' store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
ulimit -n "$(ulimit -Hn)" # a rank has connections to all others, and files
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${RANKS:-auto}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${JOB:-zerocore}" \
  --max-restarts "${RESTARTS:-3}" "${options[@]}" "$@"
