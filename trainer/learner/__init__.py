"""The learner: trains the policy with FSDP2 and AdamW, in this process or in a group of Ray actors."""
