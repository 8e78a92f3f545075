"""What runs on the far side of the sandbox's wall: standard library only, started by path, imports nothing of ours.

zygote    one process per sandbox: enters the isolation, then clones a warden for each job
warden    one process per job: applies the limits, forks the program, kills its whole tree, reports how it ended
program   the model's program, in a process that can do nothing but compute
cells     the model's cells, one after the other in one such process
box       the folder of a job, handled from outside
jail      namespaces: a root file system of its own, no network, no other processes
landlock  the same for the file system where namespaces are not to be had
seccomp   the system calls that a program may make
linux     the calls that Python's library lacks
"""
