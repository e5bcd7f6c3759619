"""Checks the options of the prefix cache's tiers against each other. No torch here."""

from mini_infer_contract.engine_options import EngineOptions


def tiers_fault(options: EngineOptions) -> str | None:
    """Says why the options of the tiers do not go together, or not with others; None if they do."""
    if bool(options.kv_disk_path) != bool(options.kv_disk_size):
        return "--kv-disk-path and --kv-disk-size go together: set both, or none"
    if options.kv_disk_path and not options.kv_host_memory:
        return "--kv-disk-path needs --kv-host-memory, through which blocks go to the disk and back: set it, too"
    if options.kv_host_path and not options.kv_host_memory:
        return "--kv-host-path is where --kv-host-memory lies: set that, too"
    if not options.kv_host_memory and options.kv_tier_dtype != "auto":
        return "--kv-tier-dtype is the format of blocks in --kv-host-memory and below it: set that, or leave this out"
    if not options.kv_host_memory:
        return None
    if not options.enable_prefix_caching:
        return "--kv-host-memory keeps blocks of the prefix cache: leave out --no-enable-prefix-caching"
    return None
