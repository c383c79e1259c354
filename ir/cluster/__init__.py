"""The machines a plan is for: devices, links, clusters as files."""
