"""The decoder-only transformer that the text recipe trains.

Any ``torch.nn.Module`` trains; two things that these declare let instep keep the bits of any placement:

``rng_block = True``, a class attribute of a submodule, makes it a *declared block*. The generator is reseeded
by (seed, step, micro-batch, block) whenever a declared block is entered, recomputation included, so its
random numbers (dropout) do not depend on what ran before it, here or in another process.

``init_parameter(name, parameter, generator)``, a method of the model, fills one parameter in place by its
name. It is called for every named parameter with a generator seeded by (seed, name), so a process can make
any part of the model, in any order, and gets the weights that the others have.
"""
