"""What pulls a student towards a teacher: divergences over whole vocabularies, over the teacher's likeliest tokens, and from sampled tokens."""
