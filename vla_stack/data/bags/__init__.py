"""Recordings of others as datasets: rosbag2 (SQLite and MCAP storage) and plain MCAP files. See docs/bags.md."""
