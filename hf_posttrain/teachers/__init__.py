"""Teachers of KD and OPD.

signal             the interface of a teacher, and the signals that it returns for a batch
local              a second model in memory
self_teacher       the student itself, at the start of training or as a moving average of its weights
served             a model on a server
router             several teachers, one for each row
cross_tokenizer    a teacher with another tokenizer
inputs             the inputs of teachers with another prompt or other tokens
eos                several EOS ids as one outcome
cache              the top k of the teacher on disk
factory            builds the teacher of a trainer
"""
