"""Who belongs to the fleet: a list given by the operator, heartbeats in a bucket, or both."""
