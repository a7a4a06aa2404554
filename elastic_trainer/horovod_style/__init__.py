"""Scripts in Horovod's own style: `hvd.elastic.run` and a loop that commits."""
