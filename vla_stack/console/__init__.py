"""The operator's browser page, the gateway that serves it, and the recording of what is driven."""
