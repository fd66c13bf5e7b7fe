"""autopar inside of other libraries' training loops, by the contracts that they have for it.

Question: how does a loop that another library runs train on several devices? In: that library's objects and the
keyword arguments of `autopar.parallelize`. Out: a strategy, or whatever else the library calls such a thing. Each
package imports its library when it is imported itself.

Files: ``lightning/`` (strategies for Lightning Fabric and the Lightning Trainer), ``accelerate.py`` (an Accelerator),
``hugging_face.py`` (a Trainer of transformers, on that Accelerator).
"""
