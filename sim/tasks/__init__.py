"""One file per task; each begins with its ``default_config()``."""
