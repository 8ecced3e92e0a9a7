package main

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// group is a set of rows of the source that one profile is fitted to: one model on one kind
// of GPU, with one engine and one number of GPUs.
type group struct {
	Name, What                     string
	Model, System, Backend, TP, EP string
	Versions                       []string
	// Shortest is the load's; see load.
	Shortest float64
}

// inferenceX is the shortest length of the benchmark InferenceX (RANDOM_RANGE_RATIO of its
// README), whose lengths and numbers of clients most rows have. It sends ten requests for each
// client.
const inferenceX = 0.8

// rounds is how many requests each client sends.
const rounds = 10

// groups are the rows that are fitted. Those of Llama-3.1-8B with TensorRT-LLM were tried and
// left out: their TTFT falls with more clients and grows with the answers, which these
// constants cannot follow.
//
// How the lengths of the other rows were drawn is not known. A tenth keeps simulated requests
// from running in step for ever.
var groups = []group{
	{Name: "h100-32b-tp2", What: "Qwen3-32B on 2 H100, vLLM 0.12.0", Model: "Qwen/Qwen3-32B", System: "h100_sxm", Backend: "vllm", TP: "2", EP: "1", Versions: []string{"0.12.0"}, Shortest: 0.9},
	{Name: "h100-32b-tp4", What: "Qwen3-32B on 4 H100, vLLM 0.12.0", Model: "Qwen/Qwen3-32B", System: "h100_sxm", Backend: "vllm", TP: "4", EP: "1", Versions: []string{"0.12.0"}, Shortest: 0.9},
	{Name: "h100-32b-fp8-tp1", What: "Qwen3-32B FP8 on 1 H100, TensorRT-LLM 1.0.0rc3", Model: "Qwen/Qwen3-32B", System: "h100_sxm", Backend: "trtllm", TP: "1", EP: "1", Versions: []string{"1.0.0rc3"}, Shortest: 0.9},
	{Name: "h100-32b-fp8-tp4", What: "Qwen3-32B FP8 on 4 H100, TensorRT-LLM 1.0.0rc3", Model: "Qwen/Qwen3-32B", System: "h100_sxm", Backend: "trtllm", TP: "4", EP: "1", Versions: []string{"1.0.0rc3"}, Shortest: 0.9},
	{Name: "h100-70b-fp8-tp4", What: "Llama-3.1-70B FP8 on 4 H100, vLLM", Model: "meta-llama/Llama-3.1-70B", System: "h100_sxm", Backend: "vllm", TP: "4", EP: "1", Versions: []string{""}, Shortest: inferenceX},
	{Name: "h200-70b-fp8-tp1", What: "Llama-3.1-70B FP8 on 1 H200, vLLM", Model: "meta-llama/Llama-3.1-70B", System: "h200_sxm", Backend: "vllm", TP: "1", EP: "1", Versions: []string{""}, Shortest: inferenceX},
	{Name: "h200-70b-fp8-tp4", What: "Llama-3.1-70B FP8 on 4 H200, vLLM", Model: "meta-llama/Llama-3.1-70B", System: "h200_sxm", Backend: "vllm", TP: "4", EP: "1", Versions: []string{""}, Shortest: inferenceX},
	{Name: "h200-gptoss-tp1", What: "gpt-oss-120b FP4 on 1 H200, vLLM 0.18.0 and one version that is not stated", Model: "openai/gpt-oss-120b", System: "h200_sxm", Backend: "vllm", TP: "1", EP: "1", Versions: []string{"", "0.18.0"}, Shortest: inferenceX},
	{Name: "h200-r1-tp8", What: "DeepSeek-R1 FP8 on 8 H200, SGLang 0.5.9", Model: "deepseek-ai/DeepSeek-R1", System: "h200_sxm", Backend: "sglang", TP: "8", EP: "1", Versions: []string{"0.5.9"}, Shortest: inferenceX},
}

// row is one measurement. For the rows of the source, load is what was sent to one engine.
type row struct {
	Profile string
	load
	times
}

// shape is what rows have in common that measured the same.
func (r row) shape() [4]int { return [4]int{r.ISL, r.OSL, r.Clients, r.Cached} }

// saturated is the TTFT in milliseconds from which a row is left out: the engine had no room
// for its clients, which then waited for each other. A profile has no cache size.
const saturated = 4000

// readSource reads the rows of all groups from the source's table. dropped counts the rows of
// each group that are saturated, or equal to another.
func readSource(r io.Reader) (rows map[string][]row, dropped map[string]int, err error) {
	c := csv.NewReader(r)
	head, err := c.Read()
	if err != nil {
		return nil, nil, fmt.Errorf("header: %w", err)
	}
	at := make(map[string]int)
	for i, name := range head {
		at[name] = i
	}
	for _, name := range []string{"model_path", "system", "backend", "backend_version", "mode", "isl", "osl", "batch_size", "tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"} {
		if _, ok := at[name]; !ok {
			return nil, nil, fmt.Errorf("no column %s: this is not silicon_sample.csv", name)
		}
	}
	rows, dropped = make(map[string][]row), make(map[string]int)
	for {
		f, err := c.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, nil, err
		}
		get := func(name string) string { return f[at[name]] }
		for _, g := range groups {
			if get("mode") != "agg" || get("model_path") != g.Model || get("system") != g.System || get("backend") != g.Backend || get("tp_size") != g.TP || get("moe_ep_size") != g.EP || !slices.Contains(g.Versions, get("backend_version")) {
				continue
			}
			r := row{Profile: g.Name, load: load{Shortest: g.Shortest, Rounds: rounds}}
			var errs [5]error
			r.ISL, errs[0] = strconv.Atoi(get("isl"))
			r.OSL, errs[1] = strconv.Atoi(get("osl"))
			r.Clients, errs[2] = strconv.Atoi(get("batch_size"))
			r.TTFT, errs[3] = strconv.ParseFloat(get("silicon_ttft_ms"), 64)
			r.TPOT, errs[4] = strconv.ParseFloat(get("silicon_tpot_ms"), 64)
			if err := errors.Join(errs[:]...); err != nil {
				return nil, nil, err
			}
			r.TTFT, r.TPOT = round(r.TTFT, 1e3), round(r.TPOT, 1e3)
			if r.TTFT > saturated || slices.Contains(rows[g.Name], r) {
				dropped[g.Name]++
				continue
			}
			rows[g.Name] = append(rows[g.Name], r)
		}
	}
	return rows, dropped, nil
}

func round(v, steps float64) float64 { return math.Round(v*steps) / steps }

// split keeps every third shape out of the fit, the second of each three in the order of
// prompt length, answer length, clients and cached tokens. All rows of a shape go together.
func split(rows []row) (fit, held []row) {
	rows = slices.SortedStableFunc(slices.Values(rows), func(a, b row) int {
		x, y := a.shape(), b.shape()
		return cmp.Or(slices.Compare(x[:], y[:]), cmp.Compare(a.TTFT, b.TTFT))
	})
	n := -1
	for i, r := range rows {
		if i == 0 || r.shape() != rows[i-1].shape() {
			n++
		}
		if n%3 == 1 {
			held = append(held, r)
		} else {
			fit = append(fit, r)
		}
	}
	return fit, held
}

// readTable reads rows of this repository's own tables, with the columns profile, clients,
// isl, osl, cached, ttft_ms and tpot_ms, where 0 is not measured. shape completes each load.
func readTable(r io.Reader, shape func(*row)) ([]row, error) {
	records, err := csv.NewReader(r).ReadAll()
	if err != nil {
		return nil, err
	}
	var rows []row
	for i, f := range records[min(1, len(records)):] {
		var r row
		r.Profile = f[0]
		if _, err := fmt.Sscan(strings.Join(f[1:], " "), &r.Clients, &r.ISL, &r.OSL, &r.Cached, &r.TTFT, &r.TPOT); err != nil {
			return nil, fmt.Errorf("line %d: %w", i+2, err)
		}
		shape(&r)
		rows = append(rows, r)
	}
	return rows, nil
}

// writeTable writes what readTable reads.
func writeTable(w io.Writer, rows []row) error {
	c := csv.NewWriter(w)
	err := c.Write([]string{"profile", "clients", "isl", "osl", "cached", "ttft_ms", "tpot_ms"})
	for _, r := range rows {
		err = errors.Join(err, c.Write(strings.Fields(fmt.Sprint(r.Profile, " ", r.Clients, r.ISL, r.OSL, r.Cached, r.TTFT, r.TPOT))))
	}
	c.Flush()
	return errors.Join(err, c.Error())
}

// loadOf completes the load of a row of a table.
func loadOf(r *row) {
	if r.Profile == own.Name {
		r.load.Shortest, r.load.Rounds, r.load.Last = 1, 1, true
		return
	}
	for _, g := range groups {
		if g.Name == r.Profile {
			r.load.Shortest, r.load.Rounds = g.Shortest, rounds
		}
	}
}

// own is the profile of this project's own measurement: medians of the time to the first
// token of lone prompts, and means of the gaps between the tokens of the last of several
// streams. docs/lab/gpu.md describes it.
var own = group{Name: "h100-8b", What: "Qwen3-8B bf16 on half of the memory of 1 H100, vLLM 0.26.0"}
