"""The learner over Megatron-core: tensor, pipeline, expert and context parallel, through Megatron-Bridge."""
