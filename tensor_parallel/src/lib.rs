//! Weights cut into shards, layers that compute on a shard and call the process group.
