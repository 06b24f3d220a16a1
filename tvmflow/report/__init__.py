"""Report: what a person reads about a release, as a page with charts."""
