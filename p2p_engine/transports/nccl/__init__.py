"""NCCL between two engines: on-demand communicators of two ranks, one for each direction."""
