"""The prefix cache's tier on a disk: pages in segment files that survive the process. No torch, no decisions."""
