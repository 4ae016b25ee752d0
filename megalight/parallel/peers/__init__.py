"""Memory shared by the GPUs of one host: slots that peers copy into, and flags that order the copies.

:mod:`.memory` has the slots and flags, :mod:`.driver` the few calls of the CUDA driver that torch lacks, and
:mod:`.spin` the kernels that wait, and the stream that copies between flags.
"""
