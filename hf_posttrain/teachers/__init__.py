"""Teachers of KD and OPD: models in memory, on a server, several by row, the student itself, other tokenizers.

signal             what a teacher returns for a batch, and the interface of a teacher
local              a second model in memory
self_teacher       the student as it was, or the moving average of its weights
served             a model on a server
router             several teachers, one for each row
cross_tokenizer    a teacher with another tokenizer
inputs             what a teacher reads: another prompt, other tokens
eos                several EOS ids as one outcome
cache              the teacher's top k on disk
factory            builds the teacher of a trainer
"""
