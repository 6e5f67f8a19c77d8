import json
def test_epochs(run_train, tiny_run, tmp_path):
    for b,a,e in ((4,4,2),(5,1,2),(4,1,2)):
        code=run_train(*tiny_run("training.overwrite_output_dir=true",data={"validation":None,"test":None},training={"max_steps":-1,"num_train_epochs":e,"per_device_train_batch_size":b,"gradient_accumulation_steps":a}))
        s=json.loads((tmp_path/"run/summary.json").read_text())
        print("RES",code,b,a,e,s["samples"],s["steps"],s["total_steps"],s["epochs"])
    code=run_train(*tiny_run("training.overwrite_output_dir=true","training.report_to=wandb",data={"validation":None,"test":None}))
    print("RES wandb",code)
