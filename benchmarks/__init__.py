"""Speed of hf_rankattn against what it replaces: ratios of medians, measured in one process, on one thread."""
