"""Outside systems, one file each: nothing else imports ray, mlflow or deepspeed."""
