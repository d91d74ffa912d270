"""A Chrome-trace toolkit: records, writes and reads traces. It imports neither torch nor Lightning."""
