"""The steps of a release, one file each: a job, a typed result, and the work from one to the other."""
