"""Images for training and evaluation, the same on every mesh.

Nothing depends on the plan: random changes of an image are drawn from (seed, epoch, image), the order from (seed,
epoch), and each data rank takes its contiguous part of every batch.

In: a data set by name. Out: each data rank's `Batch`es. Files in the order of the data: ``wanted`` and ``model_config``
(what is asked for), ``datasets`` (names to images), ``images`` (by index: in memory, in files, random), ``streams`` (in
order), ``hf`` and ``wds`` (libraries), ``transforms`` (PIL image to tensor), ``sampler`` (the images of a batch and who
reads them), ``samples`` (tensors of a batch), ``mixup``, ``device_samples``, ``device_images`` and ``image_kernels``
(batches that a GPU makes), ``loader`` (batches of one rank), ``iterable_loader`` (those of a user's DataLoader).
"""
