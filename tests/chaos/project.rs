//! A task as people give it: thirty tool calls that write a small C project, build it, test it, find a bug, mend it and go on
//! building on what is there. `make` looks at times, so a workspace that came back without them would be noticed.

use exuvia::api::proto;
use serde_json::json;

use crate::support::script::Script;

const MAKEFILE: &str = "CC = cc\nCFLAGS = -O1 -Wall -Werror\nOBJECTS = main.o add.o\n\n\
    calc: $(OBJECTS)\n\t$(CC) -o $@ $(OBJECTS)\n\n%.o: %.c calc.h\n\t$(CC) $(CFLAGS) -c -o $@ $<\n\n\
    test: calc\n\tsh test.sh\n\nclean:\n\trm -f *.o calc\n";
const MAIN: &str = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include \"calc.h\"\n\n\
    int main(int argc, char **argv) {\n  if (argc != 4) return 2;\n  long a = atol(argv[2]), b = atol(argv[3]);\n\
    \x20 if (!strcmp(argv[1], \"add\")) { printf(\"%ld\\n\", add(a, b)); return 0; }\n  /* more */\n  return 3;\n}\n";

/// Whether the host's own tools, which the sandbox sees, can build it.
pub fn has_compiler() -> bool {
    ["cc", "make"]
        .iter()
        .all(|tool| std::path::Path::new("/usr/bin").join(tool).exists())
}

/// Thirty tool calls and a `finish` that is checked.
pub fn task() -> proto::Task {
    let mut script = Script::new()
        .write("Makefile", MAKEFILE)
        .write("calc.h", "long add(long, long);\n")
        .write(
            "add.c",
            "#include \"calc.h\"\nlong add(long a, long b) { return a - b; }\n",
        )
        .write("main.c", MAIN)
        .write("test.sh", "set -e\ntest \"$(./calc add 2 3)\" = 5\n")
        .shell("make calc && echo built >> log")
        .shell("make test && echo never >> log")
        .calls(&[
            ("read_file", json!({ "path": "add.c" })),
            ("search", json!({ "pattern": "a - b", "glob": "*.c" })),
        ])
        .call("edit_file", json!({ "path": "add.c", "old": "a - b", "new": "a + b" }))
        .shell("make test && echo tested add >> log");
    for (name, operator, result) in [("mul", "*", "6"), ("sub", "-", "-1"), ("mod", "%", "2")] {
        let source = format!("#include \"calc.h\"\nlong {name}(long a, long b) {{ return a {operator} b; }}\n");
        let case = format!(
            "if (!strcmp(argv[1], \"{name}\")) {{ printf(\"%ld\\n\", {name}(a, b)); return 0; }}\n  /* more */"
        );
        script = script
            .write(&format!("{name}.c"), &source)
            .call(
                "edit_file",
                json!({ "path": "main.c", "old": "/* more */", "new": case }),
            )
            .call(
                "edit_file",
                json!({ "path": "Makefile", "old": "main.o", "new": format!("main.o {name}.o") }),
            )
            .shell(&format!(
                "echo 'long {name}(long, long);' >> calc.h; echo 'test \"$(./calc {name} 2 3)\" = {result}' >> test.sh"
            ))
            .shell(&format!("make test && echo tested {name} >> log"));
    }
    let script = script
        // Nothing has changed, so nothing is built.
        .shell("make calc; wc -l < log")
        .shell("ls; ./calc mul 6 7")
        .shell("mkdir -p out && cp calc out/ && ln -sf out/calc latest && chmod 555 out/calc")
        .shell("make clean; cat log")
        .finish("it adds, multiplies, subtracts and takes remainders");
    proto::Task {
        check: "test \"$(./latest mod 7 4)\" = 3 && test \"$(wc -l < log)\" = 5".into(),
        empty_workspace: true,
        ..script.task()
    }
}
