#!/bin/bash
# NCCL's environment variables that matter here, for the other scripts to source; set those that your cluster needs.
# Source: NVIDIA NCCL user guide, Environment Variables
# (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).

# What NCCL prints: WARN an explicit message for every call that fails; INFO also which interfaces, adapters and
# transports it has chosen, with which one checks the lines below.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# IP interfaces, for the first contact and where there is no RDMA: prefixes, `=` for exact names, `^` for all but these.
# Without it NCCL prefers those that begin with ib and avoids lo and docker.
# export NCCL_SOCKET_IFNAME="=eth0"

# RDMA adapters (InfiniBand or RoCE), with ports: prefixes, `=` for exact names, `^` for all but these. Without `=`
# mlx5_1 also means mlx5_10 to mlx5_19.
# export NCCL_IB_HCA="=mlx5_0:1,mlx5_1:1"

# RoCE alone: the index of the global ID, from `show_gids`. Left unset, -1, NCCL chooses one (since 2.21).
# export NCCL_IB_GID_INDEX=3

# Whether a ring or tree may use another adapter on another node. 0: never, for networks with a switch for each adapter
# (rails); 1: yes, where all adapters of a node are on the same switch; 2, as it is: where that is faster.
# export NCCL_CROSS_NIC=0

# How long an RDMA send waits before it counts as lost: 4.096 us x 2^timeout, 7 times over; 20, as it is since 2.23, is
# half a minute in all, 22 two minutes. With more than train.lost_after_s the run ends by its own watch first.
# export NCCL_IB_TIMEOUT=22

# NVLink SHARP, sums within the switch (Hopper and later). 2, as it is: where there is any; 0: none, and no memory for it.
# export NCCL_NVLS_ENABLE=0
