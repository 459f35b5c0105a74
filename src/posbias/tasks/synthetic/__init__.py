"""Tasks whose data are drawn in batches on the device, to train small models on; one file each."""
