"""Promotion: a release goes to a channel on somebody's wish, if it meets the channel's policy."""
