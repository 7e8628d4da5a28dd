"""Many engines simulated: their schedulers and router are the real ones, the time of a step is modelled."""
